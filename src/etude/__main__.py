"""``python -m etude`` is ``etude``."""

from etude.cli import main

raise SystemExit(main())
