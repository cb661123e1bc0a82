"""Names of stored contexts: what vLLM's hashes cannot give, since they differ from start to start.

Two requests have the same name where one may read what is retained of the other's context: if they
have its tokens, adapter, salt and settings in common, on servers of one identity.
"""

import hashlib
import json
from functools import lru_cache
from pathlib import Path

from vllm.lora.request import LoRARequest
from vllm.v1.request import Request

from vllm_kvselect.engine.states.identity import StoreIdentity
from vllm_kvselect.engine.states.names import settings_of_the_choice
from vllm_kvselect.planning.plan import Plan

_CHUNK = 2**22


def stored_name(request: Request, plan: Plan, identity: StoreIdentity) -> str | None:
    """The name of a request's compressed context in a folder.

    Returns:
        64 hexadecimal digits; None where its context is more than tokens and an adapter in a
        folder, and so not stored.
    """
    token_ids, cut = request.prompt_token_ids, plan.context_cut
    if token_ids is None or request.mm_features or request.prompt_embeds is not None:
        return None
    adapter = adapter_digest(request.lora_request)
    if adapter is None:
        return None
    tokens = json.dumps(list(token_ids[: cut.position])).encode()
    parts = {
        "identity": identity.digest,
        "tokens": hashlib.sha256(tokens).hexdigest(),
        "adapter": adapter,
        "salt": request.cache_salt,
        # The identity knows what is in the probe; where it lies is not of the choice.
        "settings": f"{settings_of_the_choice(plan.settings, 'probe')} {cut}",
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def adapter_digest(lora: LoRARequest | None) -> str | None:
    """A hash of an adapter's files, since its name may be another's after a restart.

    Returns:
        Hexadecimal digits, empty without an adapter; None if its files are not in a folder here, or
        may be replaced while the server runs.
    """
    if lora is None:
        return ""
    if lora.load_inplace:
        return None
    return _folder_digest(lora.lora_int_id, lora.lora_path)


@lru_cache(maxsize=1024)
def _folder_digest(lora_int_id: int, path: str) -> str | None:
    """Of the files that are there when the adapter is first used, as it is loaded then."""
    folder, digest = Path(path), hashlib.sha256()
    try:
        files = [each for each in sorted(folder.glob("adapter_*")) if each.is_file()]
        for each in files:
            digest.update(f"{each.name} {each.stat().st_size}\n".encode())
            with each.open("rb") as file:
                while chunk := file.read(_CHUNK):
                    digest.update(chunk)
    except OSError:
        return None
    return digest.hexdigest() if files else None
