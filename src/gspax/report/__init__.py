"""Pages, figures, and tables that describe runs."""
