"""Score with the verifier `code` in killable processes, as a run does, for remote_verifier.py.

    PYTHONPATH=. python examples/verifier_service.py PORT WORKERS

It runs the programs that it is sent: let nothing but your own network reach its port.
"""

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from rewards import RewardPool


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
