"""Deterministic prompts of token ids for the byte-level models.

The tiny models' vocabulary has 512 entries, of which 0 to 2 are special and 3 to 258 are bytes.
"""
import random

FIRST_TOKEN = 3
LAST_TOKEN = 258
BLOCK_TOKENS = 128


def tokens(seed: int, count: int) -> list[int]:
    source = random.Random(seed)
    return [source.randint(FIRST_TOKEN, LAST_TOKEN) for _ in range(count)]


def family(seed: int, stem: list[int], shared: int, total: int) -> list[int]:
    """A prompt that agrees with the stem on its first `shared` tokens and on none after it."""
    head = stem[:shared]
    rest = tokens(seed, total - shared)
    if rest and shared < len(stem) and rest[0] == stem[shared]:
        rest[0] = FIRST_TOKEN + (rest[0] + 1 - FIRST_TOKEN) % (LAST_TOKEN - FIRST_TOKEN + 1)
    return head + rest


# (stem, tokens shared with it, total tokens): block borders, inside a block by 1, 63 and 127
# tokens, no prefix at all, one the whole of another.
TWENTY = [
    (0, 8000, 8000), (0, 4096, 8000), (0, 4097, 6000), (0, 2111, 5000), (0, 1023, 4000),
    (0, 512, 3000), (0, 384, 500), (0, 447, 700), (0, 129, 1500), (0, 2000, 2000),
    (1, 6000, 6000), (1, 3071, 4500), (1, 3072, 3500), (1, 1000, 1200), (1, 640, 641),
    (1, 1, 900), (1, 255, 2500), (1, 1280, 1280), (2, 5000, 5000), (2, 0, 777),
]


def twenty(salt: int = 0) -> list[list[int]]:
    """20 prompts of 500 to 8,000 tokens that share prefixes of different lengths."""
    stems = [tokens(1000 * salt + s, 8000) for s in range(3)]
    return [
        family(1000 * salt + 100 + i, stems[stem], shared, total)
        for i, (stem, shared, total) in enumerate(TWENTY)
    ]


def loadable_tokens(length: int) -> int:
    """Tokens of a prompt that a cache can hold: full blocks, and the last token is computed."""
    return (length - 1) // BLOCK_TOKENS * BLOCK_TOKENS


def chat(salt: int, system_tokens: int, question_count: int, question_tokens: int = 200):
    """Prompts with one shared system prompt and a question each."""
    system = tokens(7_000_000 + salt, system_tokens)
    return [
        system + tokens(8_000_000 + 1000 * salt + i, question_tokens)
        for i in range(question_count)
    ]
