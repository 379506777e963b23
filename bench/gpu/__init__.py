"""What kdist does on a GPU, measured within half an hour on one: `python -m bench.gpu`.

Each part runs in a process of its own, with a time limit, so that one that fails or hangs is a row
of the page and the others go on. `parts` lists them. `--device cpu` runs the same code in
miniature: its figures say nothing about a GPU, but every line of it has run.
"""
