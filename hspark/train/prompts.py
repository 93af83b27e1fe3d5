"""Prompts to train on when none are given: edits of and questions on the standard library's functions, and topics."""

from __future__ import annotations

import random
from collections.abc import Iterator

from hspark.lab.builtin_workload import builtin_workload, standard_functions

ASKS = (
    "Explain what this function does.",
    "List the variables used here.",
    "Write a unit test for this function.",
    "Translate this function to JavaScript.",
    "Repeat this code exactly.",
    "Point out anything that could go wrong when this function is called.",
)

TOPICS = (
    *("photosynthesis", "the water cycle", "plate tectonics", "volcanoes", "the solar system", "tides", "magnetism"),
    *("compound interest", "supply and demand", "inflation", "saving money", "negotiating a salary", "taxes"),
    *("sleep", "stretching", "healthy breakfasts", "training for a marathon", "the human heart", "vitamins"),
    *("the printing press", "the Roman Empire", "the Silk Road", "the history of jazz", "medieval castles"),
    *("learning a language", "time management", "public speaking", "taking notes", "remote work", "teamwork"),
    *("machine learning", "the internet", "encryption", "databases", "version control", "unit tests"),
    *("gardening", "baking bread", "coffee", "chess", "photography", "bird watching", "camping", "bicycles"),
)

FORMS = (
    "Explain {} to a ten-year-old.",
    "Give five tips about {}.",
    "Summarise the main facts about {} in a list.",
    "Write a short story about {}.",
    "Write a poem about {}.",
    "What are common misunderstandings about {}?",
    "Compare two opinions on {}.",
    "Ask me three quiz questions about {} and answer them.",
    "Write an e-mail to a friend about {}.",
    "Describe {} in one paragraph, then repeat it as bullet points.",
)


def training_prompts(count: int, seed: int = 0) -> list[tuple[str, str]]:
    """`count` (task id, user message) pairs, the same for the same seed and Python version.

    Of every ten, six are edits, two are questions on code and two are about topics, while there are enough of each.
    ValueError if count < 1.
    """
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ValueError(f"count={count!r} prompts; use an integer of at least 1")
    rng = random.Random(seed)
    edits = ((s.task_id, s.messages[-1]["content"]) for s in builtin_workload(count, seed=seed, kind="edit"))
    asks, topics = _asks(rng), _topics(rng)
    prompts: list[tuple[str, str]] = []
    for place in range(count):
        source = edits if place % 10 < 6 else asks if place % 10 < 8 else topics
        prompt = next(source, None) or next(edits)
        prompts.append(prompt)
    return prompts


def _asks(rng: random.Random) -> Iterator[tuple[str, str]]:
    functions = standard_functions()
    pairs = [(ask, place) for ask in range(len(ASKS)) for place in range(len(functions))]
    rng.shuffle(pairs)
    for ask, place in pairs:
        yield f"ask/{functions[place].name}-{ask}", f"{ASKS[ask]}\n```python\n{functions[place].source}```"


def _topics(rng: random.Random) -> Iterator[tuple[str, str]]:
    pairs = [(form, topic) for form in range(len(FORMS)) for topic in range(len(TOPICS))]
    rng.shuffle(pairs)
    for form, topic in pairs:
        yield f"chat/{topic}-{form}", FORMS[form].format(TOPICS[topic])
