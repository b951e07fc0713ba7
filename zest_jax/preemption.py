"""A cloud's notice that it takes a machine back, turned into the SIGTERM that a run listens to.

Google Cloud's metadata server tells of it at
http://metadata.google.internal/computeMetadata/v1/instance/preempted before the machine's own
shutdown sends signals, which may reach a program late. `launch_tpu.sh` names that address.
"""

import http.client
import os
import signal
import threading
import time
import urllib.request

from zest_jax.errors import UserError

NOTICE = "ZEST_PREEMPTION_NOTICE"
"""Environment variable with the address; nobody is asked where it is not set."""
_WAIT = 60  # seconds after which the server answers without news
_AGAIN = 5.0  # seconds before it is asked again where it did not answer


def listen() -> threading.Thread | None:
    """Watches, in a thread of its own until the process ends, for the notice that the environment
    names, and sends this process SIGTERM once it comes; None where it names none.

    Raises:
      UserError: what it names is no address.
    """
    address = os.environ.get(NOTICE, "")
    if not address:
        return None
    if not address.startswith(("http://", "https://")):
        raise UserError(f"{NOTICE}={address} must be an address that begins with http://.")
    thread = threading.Thread(target=_watch, args=(address,), daemon=True)
    thread.start()
    return thread


def _watch(address: str) -> None:
    url = address  # answers at once: the notice may have been given already
    while True:
        begun = time.monotonic()
        if _asked(url) == "TRUE":
            os.kill(os.getpid(), signal.SIGTERM)
            return
        if url != address and time.monotonic() - begun < _AGAIN:
            time.sleep(_AGAIN)
        url = f"{address}?wait_for_change=true&timeout_sec={_WAIT}"


def _asked(url: str) -> str:
    request = urllib.request.Request(url, headers={"Metadata-Flavor": "Google"})
    try:
        with urllib.request.urlopen(request, timeout=_WAIT + 10) as answer:
            return answer.read(16).decode("ascii", "replace").strip()
    except (OSError, http.client.HTTPException):  # it is asked again
        return ""
