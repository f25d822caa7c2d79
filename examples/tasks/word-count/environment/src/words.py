"""Print how many different words standard input has."""

import sys

words = sys.stdin.read().split()
print(len(set(words)))
