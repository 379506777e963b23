"""Makes an image with Python and torch one that can run the trainer: `python -m
kdist_trainer.install`, an init container of such a pod, installs the trainer and packages into a
folder that the pod's other containers have on their `PYTHONPATH`.

The trainer comes as an archive, which this program runs from: Python imports from it. So this
package imports nothing but the standard library and `kdist_trainer.formats` and `log`, which do
the same.

pip runs in an environment whose packages go to that folder, and which sees those of the image: what
is there, such as torch, is not installed again.

Each installation is a folder whose name, a digest of all that decides what is in it, it gets when
it is whole; it is in the pod or in a cache that pods share, and `site` is a link to it.
"""

import json
import sys
from pathlib import Path

FOUND = sys.version_info[:2]
if FOUND < (3, 11):  # in which the rest cannot even be imported
    MESSAGE = f"spec.install: the image is Python {FOUND[0]}.{FOUND[1]}, and 3.11 is needed"
    RECORD = {"code": 64, "cause": "config", "outcome": "failed", "message": MESSAGE}
    for argument in sys.argv:
        if argument.startswith("--termination-message="):
            Path(argument.partition("=")[2]).write_text(json.dumps(RECORD, allow_nan=False))
    sys.exit(64)
