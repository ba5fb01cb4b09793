"""Readiness of the server's container: is the door open, and does the canary find somebody behind
it?

The door's sign decides. The canary's /readyz may say no on top of it, when probes go unanswered,
but a canary that is not there has no say: its crash must not take a healthy server out of the
Service.
"""

import os
import sys
import urllib.error
import urllib.request

sign, url = sys.argv[1:]
if not os.path.exists(sign):
    sys.exit("the door is shut")
opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
try:
    opener.open(url, timeout=4).close()
except urllib.error.HTTPError as error:
    sys.exit(f"the canary says: {error.read().decode(errors='replace').strip()}")
except OSError as error:
    print(f"no canary: {error}")
