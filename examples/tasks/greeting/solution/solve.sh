#!/bin/bash
echo 'Hello, étude!' > greeting.txt
