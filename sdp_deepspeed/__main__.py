from sdp_deepspeed.cli import main

raise SystemExit(main())
