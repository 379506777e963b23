"""A script that takes more memory than any limit of these tests allows."""

taken = []
while True:
    taken.append(bytearray(64 << 20))
