"""The reward of an answer."""


def score(response: str, gold: str) -> float | None:
    """Returns the share of digits that are at their right position. None: the response contains no answer.

    Example: ``score("04496", "04469")`` is 0.6. A digit too many or too few counts as wrong.
    """
    answer = response.strip()
    if not answer:
        return None
    right = 0
    for digit, right_digit in zip(answer, gold):
        right += digit == right_digit
    return right / max(len(answer), len(gold))
