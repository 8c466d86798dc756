"""The chance levels of Table 1's multiple-choice tasks, in percent."""

CHANCE = {  # of a random guess
    "piqa": 50.0,
    "winogrande": 50.0,
    "boolq": 50.0,
    "social_iqa": 100 / 3,
    "hellaswag": 25.0,
    "arc_easy": 25.0,
    "arc_challenge": 25.0,
}
SAME_ANSWER = {"boolq": 62.2}  # by one fixed answer to every question, where that is higher


def level(task: str) -> float:
    """The highest score without reading the question."""
    return max(CHANCE[task], SAME_ANSWER.get(task, 0.0))
