"""What sparse prefills read: recall of the true attention, and what is lost by it.

Every rule chooses the same number of blocks for each segment and KV head. *Recall* is the share of
a segment's attention to the tokens before it that goes to the chosen blocks, with the queries and
keys of a dense run. *Error* is how far the last hidden states of the prompt's last, dense segment
are from those of a dense run, relative to these; *loss* is how much less likely the text's own
tokens become, in nats a token, in the sparse segments and in the last one.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import track
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from papers.report import Findings
from papers.settings import AnalysisConfig
from papers.study import Study
from vllm_kvselect.config import EvictionConfig, Prefill
from vllm_kvselect.offline.attention import OutputProjections, attention_replaced
from vllm_kvselect.offline.errors import EvaluationError
from vllm_kvselect.offline.texts import read_texts
from vllm_kvselect.planning.cuts import Cuts
from vllm_kvselect.planning.segments import Segments, sparse_segments
from vllm_kvselect.prefilling.blocks import ChosenBlocks, most_critical
from vllm_kvselect.prefilling.criticality import criticality, extremes, fused
from vllm_kvselect.scoring.value_norms import projected_value_norms

Rank = Callable[["Inputs"], torch.Tensor]
"""Ranks blocks: `[num_segments, num_kv_heads, num_blocks]`, as `criticality` does."""


class Inputs:
    """What a rule may look at in a layer.

    Args:
        query: `[num_heads, num_tokens, head_size]`.
        key: `[num_kv_heads, num_tokens, head_size]`.
        value: Likewise.
        scale: Factor of the products.
        segments: The sparse segments.
        config: Sizes of segments and blocks.
    """

    def __init__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        segments: Segments,
        config: EvictionConfig,
    ) -> None:
        self.query, self.key, self.value, self.scale = query, key, value, scale
        self.config, self.block = config, config.of(Prefill).prefill_block
        self.starts = torch.arange(segments.start, segments.end, segments.size)
        self.size, self.num_before = segments.size, self.starts // self.block
        self.num_blocks = int(self.num_before[-1])
        part = slice(segments.start, segments.end)
        self.segments = extremes(query[:, part], self.size)
        self.keys = extremes(key[:, : self.num_blocks * self.block], self.block)
        self.norms: torch.Tensor | None = None

    def masked(self, logits: torch.Tensor) -> torch.Tensor:
        """Shares over the blocks before each segment, of `[num_kv_heads, segments, blocks]`."""
        is_before = torch.arange(self.num_blocks) < self.num_before[:, None, None]
        return logits.transpose(0, 1).masked_fill(~is_before, -torch.inf).softmax(-1)

    def estimate(self, scale: float) -> torch.Tensor:
        """The method's own estimate."""
        return criticality(self.segments, self.keys, scale, self.num_before)

    def spread(self) -> torch.Tensor:
        """The product of the representatives paired largest with largest, smallest with smallest.

        It is the product of the middles plus that of the halves of the ranges.
        """
        (query_middle, query_half), (key_middle, key_half) = (
            ((e.largest + e.smallest) / 2, (e.largest - e.smallest) / 2)
            for e in (self.segments, self.keys)
        )
        by_group = [part.unflatten(0, (len(self.key), -1)) for part in (query_middle, query_half)]
        products = sum(
            q @ k.mT[:, None] for q, k in zip(by_group, (key_middle, key_half), strict=True)
        )
        return self.masked(products.mean(1) * self.scale)

    def means(self) -> torch.Tensor:
        """The product of the mean query with the mean key."""
        part = slice(int(self.starts[0]), int(self.starts[-1]) + self.size)
        query = self.query[:, part].unflatten(1, (-1, self.size)).mean(2)
        key = self.key[:, : self.num_blocks * self.block].unflatten(1, (-1, self.block)).mean(2)
        products = query.unflatten(0, (len(key), -1)) @ key.mT[:, None]
        return self.masked(products.mean(1) * self.scale)

    def mass(self) -> torch.Tensor:
        """What share of the attention of each segment truly goes to each block before it."""
        group = len(self.query) // len(self.key)
        shares = torch.zeros(len(self.starts), len(self.key), self.num_blocks)
        for index, start in enumerate(self.starts.tolist()):
            end = start + self.size
            query = self.query[:, start:end].unflatten(0, (-1, group))
            logits = query @ self.key[:, None, :end].mT * self.scale
            logits[..., start:].masked_fill_(
                torch.ones(self.size, self.size, dtype=torch.bool).triu(1), -torch.inf
            )
            weights = logits.softmax(-1)[..., :start].mean((1, 2))
            shares[index, :, : start // self.block] = weights.unflatten(1, (-1, self.block)).sum(2)
        return shares


def latest(inputs: Inputs) -> torch.Tensor:
    """A sliding window of the same size."""
    ranks = torch.arange(1.0, inputs.num_blocks + 1)
    shape = len(inputs.starts), len(inputs.key), inputs.num_blocks
    return ranks.masked_fill(ranks > inputs.num_before[:, None, None], 0.0).expand(shape)


def at_random(inputs: Inputs) -> torch.Tensor:
    """Any blocks."""
    return torch.rand(len(inputs.starts), len(inputs.key), inputs.num_blocks)


def weighed(inputs: Inputs) -> torch.Tensor:
    """The method's estimate times the block's largest projected value norm."""
    assert inputs.norms is not None
    return inputs.estimate(inputs.scale) * inputs.norms


RULES: dict[str, Rank] = {
    "most attention (needs all scores)": Inputs.mass,
    "critiprefill": lambda inputs: inputs.estimate(inputs.scale),
    "critiprefill without scale": lambda inputs: inputs.estimate(1.0),
    "critiprefill times value norm": weighed,
    "largest with largest": Inputs.spread,
    "mean with mean": Inputs.means,
    "latest blocks": latest,
    "random": at_random,
}
"""Each is smoothed over layers as the method is, but for the first and the last two."""
_UNSMOOTHED = {"most attention (needs all scores)", "latest blocks", "random"}


class Run:
    """One pass over a text in which later segments read what a rule chooses.

    Args:
        model: The model.
        tokens: The text.
        config: Sizes and the budget.
        rule: The rule's name; None for a dense pass, which measures the recall of all rules.
    """

    def __init__(
        self, model: PreTrainedModel, tokens: list[int], config: EvictionConfig, rule: str | None
    ) -> None:
        segments = sparse_segments(len(tokens), Cuts(), config)
        if segments is None:
            raise EvaluationError(
                f"a prompt of {len(tokens)} tokens has no sparse segment with prefill_budget = "
                f"{config.of(Prefill).prefill_budget}; choose a longer one, or a smaller budget"
            )
        self._segments, self._config, self._rule = segments, config, rule
        self._prefill = config.of(Prefill)
        self._before: dict[str, torch.Tensor] = {}
        self._model = model
        self.recall: dict[str, list[list[float]]] = {name: [] for name in RULES}
        self.num_read: list[float] = []
        with torch.no_grad(), OutputProjections() as self._projections:
            # The first pass finds where W_O is.
            with attention_replaced(model, _dense, self._projections.watch):
                model.base_model(torch.tensor([tokens[:8]]), use_cache=False)
            with attention_replaced(model, self._attend):
                output = model(torch.tensor([tokens]), use_cache=False, output_hidden_states=True)
        self.hidden = [states[0, segments.end :] for states in output.hidden_states]
        log_likely = output.logits[0, :-1].log_softmax(-1)
        nll = -log_likely.gather(1, torch.tensor(tokens[1:])[:, None]).squeeze(1)
        self.nll_sparse = float(nll[segments.start : segments.end].mean())
        self.nll_last = float(nll[segments.end :].mean())

    def _attend(
        self, index: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        output = _dense(index, query, key, value, scale)
        if index < self._prefill.prefill_dense_layers:
            return output
        inputs = Inputs(query[0], key[0], value[0], scale, self._segments, self._config)
        if self._rule in (None, "critiprefill times value norm"):
            projection = self._projections.of(index, query[0].transpose(0, 1), key.shape[1])
            norms = projected_value_norms(value[0], projection)[
                :, : inputs.num_blocks * inputs.block
            ]
            inputs.norms = norms.unflatten(1, (-1, inputs.block)).amax(2)
        if self._rule is None:
            self._measure(inputs)
            return output
        chosen = self._choose(self._rule, inputs)
        self.num_read.append(float(chosen.counts.double().mean()) * inputs.block)
        for number, start in enumerate(inputs.starts.tolist()):
            part = slice(start, start + inputs.size)
            output[:, :, part] = _read(chosen, number, inputs, start)
        return output

    def _choose(self, name: str, inputs: Inputs) -> ChosenBlocks:
        ranks = RULES[name](inputs)
        if name not in _UNSMOOTHED:
            weight = self._prefill.prefill_layer_fusion
            ranks = self._before[name] = fused(ranks, self._before.get(name), weight)
        count = self._prefill.prefill_budget // inputs.block
        return most_critical(ranks, inputs.num_before, count)

    def _measure(self, inputs: Inputs) -> None:
        mass = inputs.mass()
        for name in RULES:
            chosen = self._choose(name, inputs)
            places = torch.arange(chosen.indices.shape[-1]) < chosen.counts[..., None]
            indices = chosen.indices.clamp(max=inputs.num_blocks - 1)
            found = mass.gather(-1, indices).masked_fill(~places, 0.0).sum(-1) / mass.sum(-1)
            self.recall[name].append(found.mean(0).tolist())


def _dense(
    _: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
) -> torch.Tensor:
    return F.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=scale, enable_gqa=True
    )


def _read(chosen: ChosenBlocks, number: int, inputs: Inputs, start: int) -> torch.Tensor:
    """Attention of a segment to the chosen blocks and to itself."""
    outputs, end = [], start + inputs.size
    for head, queries in enumerate(inputs.query[:, start:end].chunk(len(inputs.key))):
        blocks = chosen.indices[number, head, : chosen.counts[number, head]]
        before = (blocks[:, None] * inputs.block + torch.arange(inputs.block)).flatten()
        tokens = torch.cat((before, torch.arange(start, end)))
        mask = torch.ones(inputs.size, len(tokens), dtype=torch.bool).tril(len(before))
        key, value = inputs.key[head, tokens], inputs.value[head, tokens]
        outputs.append(
            F.scaled_dot_product_attention(queries, key, value, attn_mask=mask, scale=inputs.scale)
        )
    return torch.cat(outputs)


def measure_sparse_prefill(study: Study) -> Findings:
    """Measures what each rule reads of the attention, and what it costs to read no more.

    Args:
        study: Model and texts, read from their beginnings. Of the settings the budgets count, which
            are what a segment reads of the text, and `eviction` with sizes of segments and blocks.

    Returns:
        Means over the texts.
    """
    torch.manual_seed(0)
    config, results, rows = study.config, [], []
    texts = _texts(study.tokenizer, config)
    for budget in config.budgets:
        sizes = _sizes(config, budget)
        found: dict[str, list[dict[str, float]]] = {name: [] for name in RULES}
        for tokens in texts:
            dense = Run(study.model, tokens, sizes, None)
            console = Console(stderr=True)
            for name in track(RULES, f"budget {budget}", transient=True, console=console):
                run = Run(study.model, tokens, sizes, name)
                found[name].append(_compare(run, dense, name))
        for name, each in found.items():
            means = {key: sum(one[key] for one in each) / len(each) for key in each[0]}
            results.append({"budget": budget, "rule": name, **means})
            rows.append((str(budget), name, *_cells(means)))
    return Findings(
        columns=("budget", "rule", "read", "recall", "worst head", "error in the middle", "error",
                 "loss, sparse", "loss, last"),
        rows=rows,
        results={"rules": results},
        figures={},
        notes=["Means over the texts; the worst KV head is that of each text."],
    )  # fmt: skip


def _sizes(config: AnalysisConfig, budget: int | float) -> EvictionConfig:
    """Segments of a sixteenth of the text, whose first quarter is dense, unless it is said."""
    length = config.length
    values = {
        "prefill_segment": max(64, length // 16 // 64 * 64),
        "prefill_dense_until": length // 4,
        **config.eviction,
    }
    block = int(values.get("prefill_block", 32))
    num_read = budget if isinstance(budget, int) else int(budget * length)
    given = {
        "method": "none",
        "prefill": "critiprefill",
        "prefill_budget": num_read // block * block,
    }
    return EvictionConfig.parse({**values, **given})


def _texts(tokenizer: PreTrainedTokenizerBase, config: AnalysisConfig) -> list[list[int]]:
    """Beginnings of long texts, end to end."""
    ids: list[int] = []
    for text in read_texts(config.texts):
        ids += tokenizer.encode(text, add_special_tokens=False)
        if len(ids) >= config.num_texts * config.length:
            break
    else:
        raise EvaluationError(f"the texts have {len(ids)} tokens, too few for what is asked")
    return [ids[index * config.length :][: config.length] for index in range(config.num_texts)]


def _compare(sparse: Run, dense: Run, name: str) -> dict[str, float]:
    def error(index: int) -> float:
        difference = sparse.hidden[index] - dense.hidden[index]
        return float(difference.norm() / dense.hidden[index].norm())

    recall = torch.tensor(dense.recall[name])  # [num_layers, num_kv_heads]
    return {
        "recall": float(recall.mean()),
        "worst_head": float(recall.min()),
        "read": sum(sparse.num_read) / len(sparse.num_read),
        "error_middle": error(len(dense.hidden) // 2),
        "error": error(-1),
        "loss_sparse": sparse.nll_sparse - dense.nll_sparse,
        "loss_last": sparse.nll_last - dense.nll_last,
    }


def _cells(means: dict[str, float]) -> tuple[str, ...]:
    return (
        f"{means['read']:.0f}",
        f"{means['recall']:.1%}",
        f"{means['worst_head']:.1%}",
        f"{means['error_middle']:.3f}",
        f"{means['error']:.3f}",
        f"{means['loss_sparse']:+.3f}",
        f"{means['loss_last']:+.3f}",
    )
