"""Ask a service on another machine for the score, and a service that scores with the verifier `code`.

    PYTHONPATH=. python examples/remote_verifier.py PORT WORKERS                       the service, there
    --verifier examples/remote_verifier.py:remote --call_timeout 60                    here; VERIFIER_URL names it

All attempts together must take less than --call_timeout. The service works in killable processes, as a run does, and
runs the programs that it is sent: let nothing but your own network reach its port.
"""

import http.client
import json
import os
import sys
import time
import urllib.error
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from rewards import RewardPool


def remote(response, truth, row):
    body = json.dumps({"response": response, "truth": truth, "row": row}).encode()
    request = urllib.request.Request(os.environ["VERIFIER_URL"], body, {"Content-Type": "application/json"})
    for wait in (0, 1, 5):  # seconds before each attempt
        time.sleep(wait)
        try:
            with urllib.request.urlopen(request, timeout=15) as answer:
                return float(json.load(answer)["score"])
        except urllib.error.HTTPError as error:
            failure = error
            if error.code < 500 and error.code != 429:  # a rejected request stays rejected
                break
        except (OSError, ValueError, http.client.HTTPException) as error:  # no connection, or no answer in time
            failure = error
    raise RuntimeError(f"{request.full_url}: {failure!r}")


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        future = self.server.pool.submit("code", asked["response"], asked["truth"], asked["row"])
        reward = self.server.pool.result(future)
        answer = json.dumps({"score": reward.score, "status": reward.status}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)


if __name__ == "__main__":
    server = ThreadingHTTPServer(("", int(sys.argv[1])), Handler)
    server.pool = RewardPool(workers=int(sys.argv[2]), timeout=12, verifiers=["code"])
    server.serve_forever()
