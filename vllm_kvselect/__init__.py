"""KV cache eviction per attention head for stock vLLM, in vLLM's own block pool."""

__version__ = "0.1.0"


def register() -> None:
    """Entry point of the `vllm.general_plugins` group, run once in every vLLM process.

    Installs the hooks of `vllm_kvselect.engine.hooks`. Without the `--kv-eviction` option (or
    `additional_config["kv_eviction"]`) every hook hands over to vLLM's own code.
    """
    from vllm_kvselect.engine.hooks import install

    install()
