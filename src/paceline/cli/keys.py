"""WHAT do tasks on several hosts share? `paceline keys new DIR`: a secret and a certificate, to be copied to all hosts.

Called by cli/main. Must never print the secret, nor change keys that are there.
"""

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Make what the tasks of a cluster share.")

Folder = Annotated[Path, typer.Argument(metavar="DIR", help="A new folder, for you alone.")]


@app.callback()
def keys() -> None:
    """Make what the tasks of a cluster share."""


@app.command("new")
def new(folder: Folder) -> None:
    """Make DIR with a secret and a certificate; copy it to every host, and start the tasks with it."""
    from paceline.cluster.secret import new_keys

    fingerprint = new_keys(folder)
    print(f"Made {folder}/secret, certificate.pem and key.pem, for you alone; the certificate is {fingerprint[:16]}…")
    print(f"Copy the folder to every host, then: paceline serve --secret-file {folder}/secret --tls …")
