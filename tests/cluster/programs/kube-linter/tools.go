//go:build tools

package tools

import _ "golang.stackrox.io/kube-linter/cmd/kube-linter"
