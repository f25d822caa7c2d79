#!/bin/bash
if [ "$(cat greeting.txt)" = "Hello, étude!" ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
