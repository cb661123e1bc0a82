"""What the model makes of the right answer."""

import torch


def forced(logits: torch.Tensor, answer: list[int]) -> tuple[float, float]:
    """Quality of an answer that is forced on the model, without its first token.

    The first token comes out of the prefill, which eviction does not touch.

    Args:
        logits: `[num_tokens, vocabulary]`, of tokens that end with the answer.
        answer: Token ids.

    Returns:
        Negative log-likelihood in nats per token, and the share of tokens that are the likeliest.
    """
    logits = logits[-len(answer) : -1].float()
    expected = torch.tensor(answer[1:], device=logits.device)
    nll = torch.nn.functional.cross_entropy(logits, expected)
    return nll.item(), (logits.argmax(-1) == expected).double().mean().item()
