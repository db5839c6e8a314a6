"""``python -m rose_backend.cli``: what ``rose`` does."""

from rose_backend.cli import main

raise SystemExit(main())
