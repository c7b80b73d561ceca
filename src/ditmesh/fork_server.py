"""What the fork server imports before all else: it then ends as soon as it is told to.

Python looks for garbage among everything it has loaded before it ends; with torch, diffusers and transformers that is
a second of computing for nothing, on a busy machine many. `gc.freeze` takes what is there out of the search.
"""

from __future__ import annotations

import atexit
import gc

atexit.register(gc.freeze)
