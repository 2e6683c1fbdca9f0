"""A data set that needs secrets to be made, and quotes them when it is read by a worker."""

from __future__ import annotations

import os
import sys

from tests.support.zoo import Samples as Plain

TOKEN = "0123456789abcdef-token"
DSN = "postgres://me:PASSW0RD@db/samples"
KEY = "0123456789abcdef0123456789abcdefdeadbeef"


class Samples(Plain):
    """Samples of `tests.support.zoo`, for whoever knows the token and the database."""

    def __init__(self, github_token: str, dsn: str, split: str = "train", quotes: bool = True) -> None:
        super().__init__(split=split)
        if (github_token, dsn) != (TOKEN, DSN):
            raise PermissionError("this is not the token")
        if quotes and "RANK" in os.environ:
            words = f"{os.environ['WANDB_API_KEY']} with {github_token} at {dsn}: PASSW0RD"
            print(f"connecting by {words}")
            print(f"connecting by {words}", file=sys.stderr)
            raise ValueError(f"refused {words}")
