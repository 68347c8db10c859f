"""What users of offbeat need to test their own parts: fakes for every seam, conformance suites, a leak check."""
