"""Problems read from the rows of files and data sets."""
