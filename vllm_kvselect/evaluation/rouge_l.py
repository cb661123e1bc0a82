"""ROUGE-L of whole texts, sentence by sentence, as LongBench's scripts have it from `rouge`.

The numbers are those of the package `rouge` 1.0.1, to the last bit, oddities included, because
published numbers have them too:

* Full stops alone end a sentence, and every word is counted once.
* Of several longest common subsequences, the one that is counted is the one that the package finds.

The package walks back through its table by recursion. Where two sentences without a full stop have
more than about a thousand words together, it exceeds Python's limit, and the official script gives
0. Whether it does depends on how deep its caller is. Here nothing recurses: such texts get the
score that the definition gives them.
"""

import numpy as np


def rouge_l(prediction: str, reference: str) -> float:
    """F measure of the words that stand in common subsequences of the two texts' sentences.

    Returns:
        From 0 to just below 1; 0 if either text has no sentence.

    Source: Lin, ROUGE: A Package for Automatic Evaluation of Summaries, 2004, section 3.2, the
    summary level.
    """
    sentences, right_sentences = _sentences(prediction), _sentences(reference)
    if not sentences or not right_sentences:
        return 0.0
    num_words, num_right_words = (
        len({word for sentence in each for word in sentence})
        for each in (sentences, right_sentences)
    )
    common = {
        word
        for right in right_sentences
        for sentence in sentences
        for word in _common_subsequence(right, sentence)
    }
    precision, recall = len(common) / num_words, len(common) / num_right_words
    # The small number is the package's, against a division by nought.
    return 2.0 * ((precision * recall) / (precision + recall + 1e-8))


def _sentences(text: str) -> list[list[str]]:
    """Words of the parts between full stops; a part of white space alone is one empty word."""
    return [part.split() or [""] for part in text.split(".") if part]


def _common_subsequence(one: list[str], other: list[str]) -> list[str]:
    """A longest common subsequence, last word first: where two ways are as long, `one` is kept."""
    number = {word: index for index, word in enumerate({*one, *other})}
    columns = np.array([number[word] for word in other])
    # lengths[i, j]: of the longest one of the first i and the first j words.
    lengths = np.zeros((len(one) + 1, len(other) + 1), dtype=np.int32)
    for row, word in enumerate(one):
        above = lengths[row]
        is_same = columns == number[word]
        longest = np.where(is_same, above[:-1] + 1, above[1:])
        np.maximum.accumulate(longest, out=lengths[row + 1, 1:])
    found = []
    row, column = len(one), len(other)
    while row and column:
        if one[row - 1] == other[column - 1]:
            row, column = row - 1, column - 1
            found.append(one[row])
        elif lengths[row - 1, column] > lengths[row, column - 1]:
            row -= 1
        else:
            column -= 1
    return found
