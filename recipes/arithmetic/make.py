"""Writes the sums of ``recipes/arithmetic``: python recipes/arithmetic/make.py > recipes/arithmetic/sums.jsonl"""

import json
from random import Random

LARGEST = 49
SUMS = 1_200

PAIRS = tuple((a, b) for a in range(LARGEST + 1) for b in range(LARGEST + 1))
for a, b in Random(0).sample(PAIRS, SUMS):
    print(json.dumps({"prompt": f"{a} + {b} =", "answer": a + b}))
