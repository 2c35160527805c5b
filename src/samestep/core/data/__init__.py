"""Everything between a data set's files and the tensors of one step."""
