#!/bin/bash
sed -i 's/read()/read().lower()/' words.py
