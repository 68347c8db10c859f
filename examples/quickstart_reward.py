"""The reward of the quickstart: 1 for exactly the right digits, else 0."""


def exact(completion: str, answer: str) -> float:
    """`completion` is the decoded continuation without special tokens; `answer` is the data row's column."""
    return float(completion == answer)
