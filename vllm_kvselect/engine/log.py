"""Where the engine says what there is to say."""

from vllm.logger import init_logger

logger = init_logger("vllm.kvselect")  # below "vllm", so that vLLM's logging settings apply
