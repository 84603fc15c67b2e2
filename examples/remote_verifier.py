"""Ask a service on another machine for the score: --verifier examples/remote_verifier.py:remote --call_timeout 60.

VERIFIER_URL names the service, e.g. that of verifier_service.py. All attempts together must take less than
--call_timeout.
"""

import http.client
import json
import os
import time
import urllib.error
import urllib.request


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
