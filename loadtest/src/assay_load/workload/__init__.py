"""What is asked of the server, and when: strict models of workloads, and the plans they give."""
