"""Where calls run: numpy.py on the host, cuda.py on a GPU. Imported late, by the kind of array given."""
