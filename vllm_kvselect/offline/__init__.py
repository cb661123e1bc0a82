"""What measuring off the engine stands on: models, texts, questions, captures, dropped caches."""
