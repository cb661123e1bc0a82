"""An engine of a test is gone with its block: hundreds run in one process, one after the other."""

import weakref

from tests.engine.conftest import EngineFactory


def test_an_engine_is_given_back_with_all_that_it_holds(start_engine: EngineFactory) -> None:
    eviction = {"method": "adakv-perturb", "budget": 128}
    with start_engine(eviction, 100, skip_tokenizer_init=False) as engine:
        engine.generate([[*range(100, 400)]], 2)
        tokenizer = engine.llm.get_tokenizer()
        held = {
            "engine": weakref.ref(engine.llm),
            "scheduler": weakref.ref(engine.scheduler),
            "worker": weakref.ref(engine.worker),
            "model": weakref.ref(engine.worker.model_runner.model),
            "tokenizer": weakref.ref(tokenizer),
            "its method, which holds copies": weakref.ref(type(tokenizer).apply_chat_template),
        }
        del tokenizer
    assert [name for name, reference in held.items() if reference() is not None] == []
