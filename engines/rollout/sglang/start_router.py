"""The router's process, run by the interpreter that has SGLang.

    python start_router.py '{"host": …, "port": …, "policy": …}'

The launcher of sglang_router imports all of SGLang, and takes fewer policies on its command line than the router has.
"""

import json
import sys

from sglang_router.router import Router
from sglang_router.router_args import RouterArgs

if __name__ == "__main__":
    arguments = RouterArgs(**json.loads(sys.argv[1]))
    arguments._validate_router_args()
    Router.from_args(arguments).start()
