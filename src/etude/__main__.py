"""``python -m etude`` is ``etude``."""

from etude.cli.main import main

raise SystemExit(main())
