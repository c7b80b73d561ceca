"""A job of pictures: what is asked for, how every rank makes it, what its files say, and how it is made again."""
