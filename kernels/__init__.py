"""One folder per operation: the public function with its shape contract beside its implementations."""
