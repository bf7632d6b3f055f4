"""One loaded model: requests, scheduler, KV memory, the step program and the process that runs them."""
