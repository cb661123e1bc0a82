"""The plugin's entry point, which vLLM calls once in every one of its processes."""


def register() -> None:
    """Installs the hooks of `vllm_kvselect.engine.hooks`.

    Without the `--kv-eviction` option (or `additional_config["kv_eviction"]`) every hook hands over
    to vLLM's own code.
    """
    # Here and not above: vLLM logs an entry point that cannot be imported, and goes on without it.
    # What fails here ends the process instead.
    from vllm_kvselect.engine.hooks import install

    install()
