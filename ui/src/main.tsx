// Starts the page.

import { render } from "preact";

import { takeToken } from "./api";
import { Shell } from "./shell/shell";
import { applyTheme } from "./shell/theme";
import "./style.css";

takeToken();
applyTheme();
const root = document.getElementById("app");
if (root) render(<Shell />, root);
