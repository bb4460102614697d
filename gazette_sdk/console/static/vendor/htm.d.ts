// What the console uses of htm.
import type { Node } from "./preact";
type Html = (strings: TemplateStringsArray, ...values: any[]) => Node;
declare const htm: { bind(h: unknown): Html };
export default htm;
