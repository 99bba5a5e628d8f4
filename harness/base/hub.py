"""Hub: the Hugging Face hub without a network."""

from __future__ import annotations  # for older interpreters, which `versions` refuses

import os
import socket
import urllib.parse

from harness.base.text import is_url


def set_hub_offline_without_network(source: str) -> None:
    """Set the hub libraries to offline mode if `source` is not local and the hub's address cannot be resolved.
    Otherwise they retry for 20 s for each file, with warnings."""
    from huggingface_hub import constants

    has_proxy = os.environ.get("HTTPS_PROXY") or os.environ.get("https_proxy")
    is_elsewhere = is_url(source) and not source.startswith("hf://")
    if has_proxy or is_elsewhere or os.path.exists(source):
        return
    try:
        socket.getaddrinfo(urllib.parse.urlsplit(constants.ENDPOINT).hostname, 443)
    except OSError:
        constants.HF_HUB_OFFLINE = True
        os.environ["HF_HUB_OFFLINE"] = "1"
