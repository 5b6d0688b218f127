"""What an answer is worth."""


def score(response: str, gold: str) -> float | None:
    """The share of digits that are in the right place; None where there is no answer."""
    said = response.strip()
    if not said:
        return None
    return sum(one == right for one, right in zip(said, gold)) / max(len(said), len(gold))
