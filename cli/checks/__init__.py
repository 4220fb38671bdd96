"""What ``kvferry doctor`` looks at: one file a subject, one function a finding."""
