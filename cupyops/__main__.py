from cupyops.cli import main

raise SystemExit(main())
