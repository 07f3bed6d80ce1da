"""What `gspax bench` measures: whole steps, drawing, scoring, and google-tunix on the same shape."""
