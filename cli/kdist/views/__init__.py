"""What people look at while a job runs: live views, the status table, and the table of `kdist top`.

Pure: from values to text, or to rich's renderables. Nothing here asks a cluster or reads a file.
rich is imported only where something is drawn, because it takes longer to import than most commands
take to run. Read `live_run` first.
"""
