"""One page that shows a run, several runs or a scaling study: read, collected, drawn, served."""
