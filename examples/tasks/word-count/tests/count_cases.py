"""Ask the program a few questions, each in a process of its own, and print the reward."""

import json
import subprocess

RHYME = "Morning morning\nNOON noon night\n"
CASES = (("", "0"), ("Eins zwei EINS", "2"), ("a b\nA\tB c", "3"), ("one", "1"), (RHYME, "3"))


def answer(text: str) -> str:
    """What the program prints for ``text``."""
    done = subprocess.run(["python3", "words.py"], input=text, capture_output=True, text=True, timeout=10, check=False)
    return done.stdout.strip()


right = sum(answer(text) == count for text, count in CASES)
print(json.dumps({"reward": float(right == len(CASES)), "cases": right / len(CASES)}))
