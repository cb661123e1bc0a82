"""Brute force in float64: the published rules as loops over heads, queries and tokens.

Nothing here shares code with the package (only the configuration's field names), nothing is
vectorised, and sums are exact (`math.fsum`). Tensors come in as nested lists, `tensor.tolist()`,
which is exact for every floating-point type up to float64.
"""

from tests.oracle.allocation import (
    adaptive_pages,
    first_pages_first,
    first_tokens_first,
    largest_remainder,
    pyramid_blocks,
)
from tests.oracle.attention import attend, decode_attention, dot, softmax, window_attention
from tests.oracle.page_table import Row, packed_places, page_row
from tests.oracle.retain import (
    QUERY_AGNOSTIC,
    LayerInputs,
    Retained,
    base_of,
    retain,
    retain_uneven,
)
from tests.oracle.schedule import parts, schedule
from tests.oracle.scores import (
    defensive_scores,
    expected_attention,
    expected_attention_scores,
    h2o_scores,
    keydiff_scores,
    knorm_scores,
    pool,
    probe_scores,
    r_kv_scores,
    random_scores,
    snapkv_scores,
    value_l2_norms,
    value_norms,
)
from tests.oracle.selection import (
    best_first,
    mass_stage,
    select,
    select_perturbation,
    select_two_stages,
)
from tests.oracle.types import Cube, Matrix, Vector

__all__ = [
    "QUERY_AGNOSTIC",
    "Cube",
    "LayerInputs",
    "Matrix",
    "Retained",
    "Row",
    "Vector",
    "adaptive_pages",
    "attend",
    "base_of",
    "best_first",
    "decode_attention",
    "defensive_scores",
    "dot",
    "expected_attention",
    "expected_attention_scores",
    "first_pages_first",
    "first_tokens_first",
    "h2o_scores",
    "keydiff_scores",
    "knorm_scores",
    "largest_remainder",
    "mass_stage",
    "packed_places",
    "page_row",
    "parts",
    "pool",
    "probe_scores",
    "pyramid_blocks",
    "r_kv_scores",
    "random_scores",
    "retain",
    "retain_uneven",
    "schedule",
    "select",
    "select_perturbation",
    "select_two_stages",
    "snapkv_scores",
    "softmax",
    "value_l2_norms",
    "value_norms",
    "window_attention",
]
