"""HTML reports: run report, contact sheets, and the pages of `inspect`, `explain` and `runs`."""
